"""The `medusa` command: `main` collects the subcommands, one file each."""
