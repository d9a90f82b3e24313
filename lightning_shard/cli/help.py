"""The help of each command, on one screen; nothing heavy is imported for it."""

import textwrap

PROGRAM = "python -m lightning_shard"
OPTIONS = {  # those that LightningCLI does not have: the value, and what it does
    "tiles": (
        "N",
        "compute on one device in so many tiles, one after the other: 8, or 2x4 for two dims; "
        "auto for the least number that fits",
    ),
    "tile_memory": ("DIR", "waiting tiles lie in files of DIR, not in the host's memory"),
    "tile_budget": ("SIZE", "bytes of tiles that stay on the device, such as 8GB; others travel"),
    "output": (
        "PATH",
        "where predictions go: *.zarr, *.h5, *.nii.gz, *.tif, or a folder; by default the folder "
        "predictions beside the logs",
    ),
    "test_after_fit": ("BOOL", "test the final weights when fit ends"),
    "report": ("BOOL", "write report.html into the log directory; true by default"),
    "profile": ("BOOL", "record three steps of all ranks, and print where the time goes"),
}
FIRST = """\
usage: {program} COMMAND ...

Train ordinary LightningModules on inputs that are too large for one device.

commands
  fit        train
  validate   run the validation loader
  test       run the test loader
  predict    run the prediction loader
  check      train one step on two ranks of this machine, compare it with one process
  plan       predict the memory and the traffic of each rank
  calibrate  measure this machine for plan
  certify    train some steps on several meshes, and compare them with one process
  ops        list the functions that run on split tensors
  export     write a checkpoint as one file for other programs
  inspect    show what is in a checkpoint, and whether it is whole
  doctor     report versions, devices and launchers, and try two processes

options
  --help, --version
  --config   a YAML file, or the name of a config that came with the package; later ones win
  --traceback   show the traceback of a refusal

examples
  {program} fit --config tfno_darcy --config quick
  {program} fit --model my_pkg.Module --data my_pkg.Data --trainer.devices 2
  {program} fit --config tfno_darcy --tiles 8
  {program} COMMAND --help
"""
EVALUATION = """\
usage: {program} {command} --config FILE --ckpt_path FILE [options of fit]

Runs the data of `{command}` through the model.

options
  --config FILE         of the run that saved the checkpoint, such as its config.yaml
  --ckpt_path FILE      the weights
{own}
  --help all            every option

examples
  {program} {command} --config tfno_darcy --ckpt_path outputs/tfno_darcy/last.ckpt
"""
PAGES = {
    "fit": """\
usage: {program} fit --config FILE [options]

Trains a LightningModule. Each argument of the model, of its data and of the Trainer is an option,
or a line in a YAML file. Later files and options win.

options
  --config FILE         a YAML file, or the name of a config that came with the package
  --model CLASS         such as my_package.MyModule; its arguments: --model.NAME VALUE
  --data CLASS          such as my_package.MyData; its arguments: --data.NAME VALUE
  --trainer.NAME VALUE  max_epochs, accelerator, devices, num_nodes, precision, ...
  --trainer.strategy.NAME VALUE   domain_parallel_size, shard_dims, sharding, ...
  --ckpt_path FILE      go on from a checkpoint
{own}
  --print_config        show what all of this comes to, and train nothing
  --help all            every option of the Trainer, with its description
  --model.help CLASS    the arguments of a class; --data.help and --trainer.strategy.help alike

examples
  {program} fit --config tfno_darcy --trainer.strategy.domain_parallel_size 2
  {program} fit --model my_pkg.Module --data my_pkg.Data --trainer.devices 2
  {program} fit --config tfno_darcy --tiles 8
""",
    **dict.fromkeys(("validate", "test"), EVALUATION),
    "predict": EVALUATION.replace(
        "the model.",
        "the model, and writes what predict_step\nreturns, each sample once, in the order of the "
        "dataset.",
    ).replace("outputs/tfno_darcy/last.ckpt\n", "last.ckpt --output out.zarr\n"),
    "check": """\
usage: {program} check --config FILE [options of fit]

Trains one step of a module in one process and on two ranks that share each sample (four where two
dims are split), on the CPU of this machine. It compares loss, gradients and buffers, and names the
functions that have no rule for split tensors. Model and first batch are those of `fit`.
It ends with status 1 if the module cannot train so.

options
  all options of fit: {program} fit --help all

examples
  {program} check --config tfno_darcy --config domain_2x2
  {program} check --model my_package.MyModule --data my_package.MyData
""",
    "plan": """\
usage: {program} plan --config FILE [--cluster CLUSTER ...] [options of fit]

Predicts what each rank will hold and send in one training step: parameters, gradients, the
optimizer's state, activations and messages. One step is rehearsed on the CPU of this machine, which
need not be the one that the config asks for. For a cluster it predicts the time of a step, too, and
with --best it ranks all meshes, sharding modes and ways to save memory; it then writes plan.yaml,
to be given to fit with the config, and plan.txt.

options
  --cluster CLUSTER   nodes x devices x kind, such as 8x8xH100; other links: 8x8xH100:HDR or
                      8x8xH100:PCIe5/Ethernet100; or a .json file of a machine that was measured
  --measure           this machine has such a device: run the kernels of the step on it, and take
                      their times, not rates
  --best              rank what fits
  --offload           predict sizes of activation_offload, and name the smallest one that makes a
                      step at most 5 % longer
  --price PRICE       of a device for an hour: the cost of an epoch is shown
  --output DIR        where --best writes; by default trainer.default_root_dir
  all options of fit: {program} fit --help all
  --trainer.devices N, --trainer.num_nodes N      how many ranks, where no cluster is given
  --trainer.strategy.domain_parallel_size N       how many of them share a sample

examples
  {program} plan --config tfno_darcy --config node_of_8 --config domain_2
  {program} plan --config tfno_darcy --best --cluster 8x8xH100 --price 2.5
""",
    "calibrate": """\
usage: {program} calibrate [--output FILE] [--processes N] [--device DEVICE]

Measures in about two minutes what kernels and collectives take on this machine, and writes a file
for plan --cluster. All ranks measure at the same time, since they share the machine in a run,
too. Let nothing else run meanwhile. Started by a launcher, it measures the ranks of the launcher.

options
  --output FILE     machine.json by default
  --processes N     ranks that are started here; by default one for each device, or two on a CPU
  --device DEVICE   its type, as torch names it; by default the first that this machine has

examples
  torchrun --nproc-per-node 8 -m lightning_shard calibrate --output node.json
  {program} plan --config tfno_darcy --cluster machine.json
""",
    "certify": """\
usage: {program} certify --config FILE [--meshes LIST] [--steps N] [options of fit]

Trains some steps on several meshes and in one process, on the CPU of this machine, in float64 and
in the precision of the config. It compares losses and weights after each step, says what rounding
explains, and names the first module and function whose output differs by more. It writes
certificate.md and .json, and ends with status 1 if a mesh differs.

options
  --meshes LIST   such as 1x1,1x2,2x2,1x4: data replicas x ranks of a domain, or 1x2x2
  --steps N       how many batches; 50 by default
  --output DIR    where the certificate goes; by default trainer.default_root_dir
  --simulated     ranks in one process instead of processes
  all options of fit: {program} fit --help all

examples
  {program} certify --config tfno_darcy --config quick --meshes 1x2,2x2 --steps 20
""",
    "ops": """\
usage: {program} ops [NAME] [--markdown]

Lists the functions that run on split tensors, and the limits of each.

arguments
  NAME         only functions whose name contains it; status 2 if there is none
  --markdown   as a page of documentation

examples
  {program} ops conv
  {program} ops --markdown > operations.md
""",
    "export": """\
usage: {program} export CHECKPOINT OUT [--strip PREFIX] [--trusted]

Writes a checkpoint as one file for other programs. The end of OUT chooses what is written.

arguments
  CHECKPOINT   a file, or a sharded directory
  OUT          *.safetensors, *.pt, *.pth, *.bin: the weights; *.ckpt: all of it, as a Lightning
               checkpoint that loads without this package
  --strip PREFIX   leave out this beginning of the weights' names, such as network.
  --trusted    build objects that the checkpoint holds, which can run code

examples
  {program} export outputs/run/last.ckpt weights.safetensors --strip network.
""",
    "inspect": """\
usage: {program} inspect CHECKPOINT [--trusted]

Shows what is in a checkpoint: kind, epoch, mesh, versions, hyperparameters, weights and optimizer.
It ends with status 1 if the checkpoint is not whole.

arguments
  CHECKPOINT   a file, or a sharded directory
  --trusted    build objects that the checkpoint holds, which can run code

examples
  {program} inspect outputs/run/last.ckpt
""",
    "doctor": """\
usage: {program} doctor

Reports versions, devices, backends of torch.distributed, launchers and folders that can be written,
and runs two processes that add a number over gloo. Paste the output into an issue.
It ends with status 1 if the two processes fail.

examples
  srun -n 1 {program} doctor
""",
}


def page(command: str) -> str:
    """Return the help of a command, or of all of them for the empty word."""
    own = "\n".join(
        textwrap.fill(
            f"{f'--{name} {value}':<21} {text}",
            100,
            initial_indent="  ",
            subsequent_indent=24 * " ",
        )
        for name, (value, text) in OPTIONS.items()
        if name.startswith("tile")
        or (command == "predict" if name == "output" else command == "fit")
    )
    return PAGES.get(command, FIRST).format(program=PROGRAM, command=command, own=own).rstrip()
