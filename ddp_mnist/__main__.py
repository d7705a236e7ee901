from ddp_mnist.cli import main

if __name__ == "__main__":
    main()
