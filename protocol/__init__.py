"""What is said: names, faults, settings, messages, and the sockets that carry them.

Nothing here decides anything and nothing here imports the rest of perdure.
"""
