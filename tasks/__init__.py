"""Evaluation tasks, one class a module, reached through ``_target_`` in ``conf/task``. Imports no torch."""
