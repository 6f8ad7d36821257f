"""The training itself, worker side: TRL's trainers behind the seam, their loss, checkpoints and metrics."""
