"""Sentiment of Chinese reviews: DataParallel in a written-out loop, and the Hugging Face Trainer.

- `python -m examples.bert_dp`: the loop, in `train`.
- `python -m examples.bert_dp.trainer`, `.trainer_robust`: the Trainer, brief and robust.
- `python -m examples.bert_dp.predict`: what a trained model says about a text or a csv file.
- `reviews`, `tokens`, `data`: from a csv file to batches of token numbers.
- `model`, `classifier`, `fast_bert`: BERT loaded and saved, its loss, and less arithmetic for it.
"""
