"""Additional programs for bert_dp."""
