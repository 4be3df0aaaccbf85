"""The agent: parent of the ranks of one host.

It spawns them, sees their deaths, judges hangs and kills; it never imports torch.
"""
