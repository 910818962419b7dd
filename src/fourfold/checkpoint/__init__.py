"""Checkpoints: a run's state in a folder that is complete, or does not exist under its name.

    runs/NAME/checkpoints/step-00000100/rank-000.safetensors …   the tensors, divided among the ranks
                                        manifest.json            which part of which tensor is in which file; the rest

manager   saves while training continues, and restores the newest good checkpoint
writer    a thread that writes a rank's part, and on rank 0 makes the manifest of what all ranks report
store     the checkpoints of a run: which there are, and which are kept
collect, restore    a run's state into tensors and JSON, and back
Law: what is loaded has been verified, by size and checksum, before any of it is used. No pickle is ever read.
"""
