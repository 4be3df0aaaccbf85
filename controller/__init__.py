"""Who decides: one controller per job.

`core/` is the pure machine that takes every decision; the modules beside it are the world around it: the journal, the
lease that lets only one controller lead a job, the run directory and the log.
"""
