"""Who decides: the pure state machine of a job.

Same events, same commands, always. Nothing in this folder performs IO, reads a clock, draws a random number or
imports torch; time comes in as an argument, in seconds of the controller's monotonic clock.
"""
