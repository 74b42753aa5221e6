"""Data of several examples, and which rank gets which sample.

- `idx`: `image_data(name, directory)`, an `ImageData` of grey images held in memory: the digits
  that come with scikit-learn, MNIST, Fashion-MNIST, or any folder with files in their format.
- `samplers`: `Shard` for evaluation, `GlobalBatchSampler` for training.
- `download`: `mnist_folder`, which finds or downloads the files of MNIST.
- `models`: `DigitNet`.
"""
