"""What tests need: an oracle in one process, ranks as threads, worlds of processes, hosts as network namespaces."""
