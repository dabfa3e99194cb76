"""What ``sensitivity measure`` and ``sensitivity demo`` share: the job, its folder, table and figures."""
