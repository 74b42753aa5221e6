"""Sentiment of Chinese hotel reviews with BERT: data parallelism written out, and by the Hugging Face Trainer."""
