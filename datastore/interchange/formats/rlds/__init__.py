"""RLDS: episodes in TFDS's folders of TFRecords, read without TensorFlow."""
