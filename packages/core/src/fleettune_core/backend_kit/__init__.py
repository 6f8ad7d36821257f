"""What backends share, a third party's too: the portable form of optimizer state, and a process group for one."""
