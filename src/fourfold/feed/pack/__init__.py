"""The pack: samples as aligned records in a few large files, with an index and checksums."""
