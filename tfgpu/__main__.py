"""`python -m tfgpu` is the same as the command `tfgpu`."""

from tfgpu.cli import main

if __name__ == "__main__":
    main()
