"""DLIO's emulation of training: the real feed and real bytes, with an emulated accelerator."""
