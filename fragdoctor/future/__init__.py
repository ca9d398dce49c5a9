"""What a run would do after its recording ends."""
