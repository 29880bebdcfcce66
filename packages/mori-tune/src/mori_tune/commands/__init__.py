"""The subcommands of `mori-tune`, one module each."""
