"""What tests are made of: an oracle in one process, ranks as threads, worlds of processes."""
