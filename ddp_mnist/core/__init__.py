"""A trainer that one reads to the ground, and may take along.

It trains MNIST with Accelerate on one process, many, or many machines. N processes end with the
weights of one, a resumed run as an unbroken one bit for bit, and each row of a test counts once:

    python -m ddp_mnist.core --dataset ylecun/mnist
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m ddp_mnist.core
    torchrun --nproc-per-node 2 -m ddp_mnist.core --resume

One epoch takes some ten seconds on two cores and reaches 99 %. Nothing here imports the rest of the
package, so a copy is a trainer of your own:

    cp -r ddp_mnist/core my_trainer
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m my_trainer

Four functions in __main__.py are yours: `make_rows` (your images and targets), `make_net`,
`make_task` (what is learned, and its score; derive one from `Task`) and `make_recipe`. The rest
stays. Read it in this order:

    fit          the loop: a step in micro-batches, sync points, validation, test
    batches      global batches, whose order is a function of (seed, epoch)
    augment      random changes, by a table of numbers for each epoch
    seeding      a stream of random numbers for each purpose
    nets         the nets; wrappers has what stands around one, optim the optimizers
    recipe       how a net is trained; the learning rate is a function of the step
    task         what is learned: the mean of a loss over the batch, and a score
    accelerator  what Accelerate and DDP are told, and what they do not do by themselves
    meter        sums over the ranks about once a second, and when to save
    evaluation   metrics that count each row once; metrics has those of classes
    state        all that training changes; checkpoint makes bytes of it that show damage
    run          what fit tells the outside: derive yours to write it elsewhere
    errors       how a run ends early

Three rules keep N processes equal to one. A batch is global, and each rank gets its part. A loss
is a mean over images that are weighted alike: what divides by a sum over the rank's own part
(`F.cross_entropy(..., weight=w)`, a mean over a mask) is another loss on each number of processes;
see `Classification.training_loss`. And whatever is random is drawn for a row or a step, never for a
rank's share.
"""
