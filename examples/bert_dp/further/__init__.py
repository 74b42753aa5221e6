"""Further programs for bert_dp."""
