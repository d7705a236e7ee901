from ddp_mnist.cli import program

if __name__ == "__main__":
    program()
