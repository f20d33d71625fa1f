"""What one command does, top to bottom: one module a job, reached through ``conf/job``."""
