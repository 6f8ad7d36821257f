"""What backends share, a third party's too: optimizer state on disk, whole weights, a process group, dealing rows."""
