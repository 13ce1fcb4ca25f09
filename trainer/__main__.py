"""`torchrun --nproc-per-node 4 -m trainer --source …`: the ranks are torchrun's, everything else is `hsstore train`."""

from hsstore.cli import main

if __name__ == "__main__":
    import sys

    main(["train", *sys.argv[1:]])
