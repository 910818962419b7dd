"""Checkpoints: a run's state in a folder that is there whole, or not at all.

    runs/NAME/checkpoints/step-00000100/rank-000.safetensors …   the tensors, cut among the ranks
                                        manifest.json            which box of which tensor is where, and all the rest

shelf    the checkpoints of a run: which there are, which are kept
keeper   saves while the training goes on, and finds where to go on
Law: what is loaded has been verified, by size and checksum, before any of it is used. No pickle is ever read.
"""
