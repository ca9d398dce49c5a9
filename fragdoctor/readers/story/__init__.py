"""What a log tells beside its messages: progress, trials, figures, retries and restarts."""
