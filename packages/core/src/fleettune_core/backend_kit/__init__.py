"""What backends share, a third party's too: optimizer state in the portable form, whole weights, a process group."""
