"""Pictures: datasets of one kind of sample, decoding, augmentation, batches in memory and on the device."""
