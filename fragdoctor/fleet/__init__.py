"""Many ranks of one job: each summarised on some worker, all merged into one report."""
