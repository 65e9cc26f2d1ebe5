"""The command `tfgpu`, also as `python -m tfgpu`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while it is imported is reported in one line, as later."""
    try:
        from tfgpu import cli
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
