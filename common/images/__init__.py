"""Folders of images: found, decoded, cropped, resized, and handed to the device in batches.

- `args`: the flags `ImageArgs`, without torch.
- `sets`: `load_images(args.images, seed, out)`, an `ImageSets` of what to train and to evaluate on.
- `loader`: `train_loader` and `eval_loader` of an `ImageFolder`: `Batches` on the device.
- `folder`: `ImageFolder`, `LabelsOnly`; `synthetic`: `SyntheticImages`.
- `find`, `names`, `index`: the list of a folder's images, of a large one kept in a file.
- `shapes`: `drawn_images`, which draws a folder of JPEGs where there are no files.
- `decode`, `crop`: files to pixels, and pixels to the final size; `cache`: `PixelCache`, decoded
  pixels on the disk.

Everything random follows from (seed, epoch, index of the sample): it does not matter which worker
or rank loads it, or whether the run was interrupted.
"""
