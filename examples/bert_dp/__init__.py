"""BERT with nn.DataParallel on Chinese hotel reviews; the algorithm is in train.py."""
