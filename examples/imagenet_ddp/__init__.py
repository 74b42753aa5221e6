"""imagenet_ddp: train torchvision's classification models on folders of images."""
