"""A trainer that is small enough to read to its end, and to copy.

It trains MNIST with Accelerate on one process, many, or many machines. N processes end with the
weights of one, up to rounding (--float64 shows it); a resumed run ends as an uninterrupted one, bit
for bit; each row of a test counts once:

    python -m ddp_mnist.core --dataset ylecun/mnist
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m ddp_mnist.core
    torchrun --nproc-per-node 2 -m ddp_mnist.core --resume

One epoch takes some 15 s on two cores and reaches 99 %. Nothing here imports the rest of the
package, so a copy is a trainer of your own:

    cp -r ddp_mnist/core my_trainer
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m my_trainer

Four functions in __main__.py are yours: `make_rows` (your images and targets; `read` is its
helper), `make_net`, `make_task` (what is learned, and its score; derive one from `Task`) and
`make_recipe`. The rest stays. MNIST needs less than there is: it has no validation, no
augmentation, one of the nets. Read it in this order:

    __main__     MNIST: what is trained, and how the program ends
    fit          the loop: a step in micro-batches, sync points, validation, test
    recipe       how a net is trained; the learning rate is a function of the step
    batches      global batches, whose order is a function of (seed, epoch)
    augment      random changes, by a table of numbers for each epoch
    seeding      a stream of random numbers for each purpose
    nets         the nets; wrappers has what normalises their pixels, optim the optimizers
    task         what is learned: the mean of a loss over the batch, and a score
    accelerator  what Accelerate and DDP are told, and what they do not do by themselves
    meter        sums over the ranks about once a second, and when to save
    evaluation   metrics that count each row once; metrics has those of classes
    state        all that training changes; checkpoint makes bytes of it, with a checksum
    run          what fit reports, and where it is kept: derive yours to do so elsewhere
    errors       how a run ends early

Three rules keep N processes equal to one. A batch is global, and each rank gets its part. A loss
is a mean over images, all equally many on each rank: what divides by a sum over the rank's own part
(`F.cross_entropy(..., weight=w)`, a mean over a mask) is another loss on each number of processes;
see `Classification.training_loss`. Random numbers are drawn for an image, by its row. What a net
draws in forward (Dropout) differs between ranks, and BatchNorm's statistics are each rank's own:
such nets train on N processes as well as on one, but not to the same weights.
"""
