"""Programs beside the subject of bert_dp."""
