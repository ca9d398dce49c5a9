"""``python -m fragdoctor``."""

from fragdoctor.cli.app import main

if __name__ == "__main__":
    main()
