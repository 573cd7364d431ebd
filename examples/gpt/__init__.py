"""The parts of examples/pretrain_gpt.py, one idea a file."""
