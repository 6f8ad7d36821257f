"""The built-in launcher (`local`), and the job of a child process that launchers on one machine share."""
