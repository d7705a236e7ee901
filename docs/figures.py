# ruff: noqa: RUF001  (the signs of Chinese and of mathematics are meant)
"""This program draws the figures of the course: `python docs/figures.py`, a second.

It writes figures/NAME.en.svg and figures/NAME.zh.svg: the same geometry, with texts of TEXTS. They
are made for a phone, 360 units wide, and follow the reader's light or dark scheme. Everywhere a
colour stands for one rank, and a box in four colours for a sum over four ranks.
"""

import math
from html import escape
from pathlib import Path

STYLE = """
svg{--bg:#fff;--ink:#1f2328;--soft:#59636e;--edge:#d1d9e0;
--r0:#0072b2;--r1:#d55e00;--r2:#009e73;--r3:#cc79a7;--c:var(--soft)}
@media(prefers-color-scheme:dark){svg{--bg:#161b22;--ink:#e6edf3;--soft:#9aa5b1;--edge:#3d444d;
--r0:#4aa8f0;--r1:#ffb54a;--r2:#1fb886;--r3:#e58cc0}}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"PingFang SC","Hiragino Sans GB",
"Microsoft YaHei","Noto Sans CJK SC","Noto Sans SC",sans-serif;fill:var(--ink)}
.title{font-size:16px}.title,.b{font-weight:600}.s{fill:var(--soft)}.s,.t,.m{font-size:12px}
.m{font-family:ui-monospace,Menlo,Consolas,"Noto Sans Mono CJK SC",monospace}
.c{text-anchor:middle}.e{text-anchor:end}
.r0{--c:var(--r0)}.r1{--c:var(--r1)}.r2{--c:var(--r2)}.r3{--c:var(--r3)}
rect,circle{fill:var(--c);fill-opacity:.15;stroke:var(--c)}path{fill:none;stroke:var(--c)}
.arrow{stroke-width:1.5;stroke-linecap:round;stroke-linejoin:round}
.pale{fill-opacity:.07;stroke-opacity:.4}.deep{fill-opacity:.4}.faint{stroke-opacity:.35}
.blank{fill:none;stroke-dasharray:3 3}.dashed{stroke-dasharray:5 4}.ink{--c:var(--ink)}
.solid{fill:var(--c);fill-opacity:.85;stroke:none}
.card{fill:var(--bg);fill-opacity:1;--c:var(--edge)}
"""

RANKS = range(4)
Bars = list[tuple[int, int, str, str]]  # from, to, text, css
Rows = list[list[tuple[str, int]]]  # for each rank (text, whose it is), or 4 for a sum over all
States = list[list[list[set[int]]]]  # whose parts are in the sum of [step][rank][chunk]
Places = list[tuple[float, float]]

# What is drawn, in English and in Chinese. A text that is not here is the same in both.
TEXTS = {
    # ddp
    "ddp": ("One DDP step on two ranks", "两个 rank 上的一步 DDP"),
    "ddp desc": (
        "A global batch of four images is dealt out to two ranks. Each has a replica of the model"
        " and computes gradients of its own images; an all-reduce gives both the mean, -15, and"
        " both take the same step, from w = 1 to w = 2.5.",
        "一个全局 batch 的四张图像分给两个 rank。每个 rank 有一份模型副本，计算自己那些图像的梯度；"
        "all-reduce 之后两边都得到平均 -15，于是两边做同样的更新：w 从 1 变为 2.5。",
    ),
    "ddp task": (
        "A model w·x with w = 1; learning rate 0.1.\nThe label of x is y = 3x; an image's loss is\n"
        "(w·x − y)² / 2, its gradient (w·x − y)·x.",
        "模型 w·x，此刻 w = 1；学习率 0.1。\nx 的标签是 y = 3x；每张图像的损失为\n"
        "(w·x − y)² / 2，梯度为 (w·x − y)·x。",
    ),
    "global batch": ("global batch: four images", "全局 batch：四张图像"),
    "shard": ("its shard", "它的分片"),
    "replica": ("replica, w = 1", "副本，w = 1"),
    "gradients": ("gradients", "梯度"),
    "mean -5": ("mean −5", "平均 −5"),
    "mean -25": ("mean −25", "平均 −25"),
    "all-reduce mean": (
        "all-reduce: the mean over the ranks",
        "all-reduce：各 rank 梯度的平均",
    ),
    "update": ("the same update", "同样的更新"),
    "ddp proof": (
        "One process with all four images would take\n"
        "the same step: (−2 − 8 − 18 − 32) / 4 = −15.\n"
        "So the replicas stay equal, and no weights\nare sent again.",
        "一个进程处理全部四张图像，更新也一样：\n(−2 − 8 − 18 − 32) / 4 = −15。\n"
        "所以副本始终相同，权重不用再传。",
    ),
    # buckets
    "buckets": ("When gradients travel: buckets", "梯度何时发送：梯度桶"),
    "buckets desc": (
        "Two time charts of one step. In a large net all-reduces of full buckets run while backward"
        " still computes; only the last is waited for. This project's net fills one bucket of"
        " 0.15 MB, which is sent after backward, so nothing overlaps.",
        "一步的两张时间图。较大的模型里，装满的梯度桶在反向计算的同时做 all-reduce，只需等最后"
        "一个。本项目的模型只有一个 0.15 MB 的梯度桶，反向结束后才发送，没有重叠。",
    ),
    "not to scale": (
        "One step, time from left to right, not to scale.",
        "一步之内，时间从左到右，未按比例。",
    ),
    "large net": ("A large net: several buckets", "较大的模型：多个梯度桶"),
    "large note": (
        "While bucket 4 travels, backward computes\nlayer 3. Only the last bucket is waited for.\n"
        "A bucket is closed at 25 MiB, the first at 1 MiB.",
        "第 4 组的桶传输时，反向正在计算第 3 组。\n只有最后一个桶需要等待。\n"
        "攒够 25 MiB 就封口，第一个 1 MiB（默认值）。",
    ),
    "small net": ("This project's net: one bucket", "本项目的模型：只有一个桶"),
    "small note": (
        "37,834 parameters × 4 bytes = 0.15 MB: less\nthan the first bucket. It is full only when\n"
        "backward ends, so nothing overlaps.",
        "37,834 个参数 × 4 字节 = 0.15 MB，连第一个桶\n都装不满。反向结束才凑齐，所以没有重叠。",
    ),
    "network": ("network", "网络"),
    "forward": ("forward", "前向"),
    "backward": ("backward, layers 4 to 1", "反向，从第 4 组层到第 1 组"),
    "backward all": ("backward", "反向"),
    "all-reduces": ("all-reduce of each bucket", "每个桶的 all-reduce"),
    "step": ("step", "更新"),
    # ring
    "ring": ("A ring all-reduce, step by step", "环形 all-reduce，逐步看"),
    "ring desc": (
        "Four ranks in a ring, each with its gradients in four chunks, a to d. In three steps of"
        " reduce-scatter each rank adds what it receives; in three of all-gather the finished sums"
        " go round. The table below shows what each rank holds after each step.",
        "四个 rank 连成环，各自把梯度分成 a 到 d 四块。reduce-scatter 的三步里，每个 rank 把"
        "收到的块累加到自己的块上；all-gather 的三步里，求好的和再传一圈。"
        "下面的表列出每步之后各 rank 手里有什么。",
    ),
    "ring task": (
        "Columns a to d: the gradients in four chunks.\n"
        "A coloured cell: that rank's part is in the sum.",
        "a 到 d 列：梯度切成的四块。\n格子涂上某种颜色，表示对应 rank 的梯度已经加进来了。",
    ),
    "ring start": ("start", "开始"),
    "ring end": ("all have all sums", "各 rank 都有全部的和"),
    **{f"ring {n}": (f"step {n} of 6", f"第 {n} 步（共 6 步）") for n in range(1, 7)},
    "own gradients": ("own gradients", "只有自己的梯度"),
    "adding": ("reduce-scatter: add what comes", "reduce-scatter：收到就累加"),
    "passing": ("all-gather: finished sums go round", "all-gather：把求好的和传一圈"),
    "ring note": (
        "Each rank sends 6 messages of a quarter:\n1.5 times the gradients; with N ranks\n"
        "2 (N − 1) / N times, always less than twice.",
        "每个 rank 发 6 次，每次四分之一：共为梯度\n"
        "大小的 1.5 倍；N 个 rank 时为 2 (N − 1) / N 倍，\n始终不到两倍。",
    ),
    # collectives
    "collectives": ("Seven collectives, four ranks", "七种集合通信，四个 rank"),
    "collectives desc": (
        "Before and after broadcast, scatter, gather, all-gather, reduce, all-reduce and"
        " reduce-scatter, each a row per rank.",
        "broadcast、scatter、gather、all-gather、reduce、all-reduce、reduce-scatter 的前后"
        "对照，每行一个 rank。",
    ),
    "collectives task": (
        "A row is a rank. A colour is whose data it is;\na box of four colours is a sum over all.",
        "一行是一个 rank；颜色表示数据来自谁，\n四色的格子是对所有 rank 求的和。",
    ),
    "before": ("before", "之前"),
    "after": ("after", "之后"),
    "broadcast": ("broadcast", "broadcast（广播）"),
    "broadcast use": ("rank 0's weights, when DDP starts", "DDP 启动时，rank 0 的权重"),
    "scatter": ("scatter", "scatter（分发）"),
    "scatter use": ("one rank deals out its data", "一个 rank 把数据分出去"),
    "gather": ("gather", "gather（收集）"),
    "gather use": ("results to the rank that writes files", "结果汇到写文件的 rank"),
    "all_gather": ("all-gather", "all-gather（全收集）"),
    "all_gather use": ("predictions, for exact metrics", "预测结果，用来算精确的指标"),
    "reduce": ("reduce", "reduce（归约）"),
    "reduce use": ("a sum that one rank needs", "只有一个 rank 需要的和"),
    "all_reduce": ("all-reduce", "all-reduce（全归约）"),
    "all_reduce use": ("DDP's gradients, in each step", "DDP 每一步的梯度同步"),
    "reduce_scatter": ("reduce-scatter", "reduce-scatter（归约分发）"),
    "reduce_scatter use": ("the first half of a ring all-reduce", "环形 all-reduce 的前一半"),
    # multinode
    "launcher": ("launcher", "启动器"),
    "multinode": ("How a run on two machines begins", "两台机器上的训练如何开始"),
    "multinode desc": (
        "Seven steps: launchers set variables, rank 0 or torchrun serves the store, all ranks"
        " register, who is missing is named after a deadline, facts are compared, NCCL or gloo"
        " connects the ranks, and DDP broadcasts rank 0's weights.",
        "七步：启动器设置环境变量，rank 0 或 torchrun 提供键值存储，所有 rank 登记，"
        "到期报出缺少的 rank，比对各自的配置，NCCL 或 gloo 建立连接，DDP 广播 rank 0 的权重。",
    ),
    "node 0": ("node 0, the main node", "节点 0，主节点"),
    "node 1": ("node 1", "节点 1"),
    "store": ("store", "键值存储"),
    "multinode 1": (
        "A launcher on each node starts the ranks\nand tells them by variables:",
        "每个节点上的启动器拉起各个 rank，\n并用环境变量告诉它们：",
    ),
    "multinode 2": (
        "Rank 0, or torchrun on its machine, serves the\n"
        "store, a key-value server at that address.",
        "rank 0（或它那台机器上的 torchrun）在这个地址\n"
        "和端口上提供键值存储：一个基于 TCP 的小服务。",
    ),
    "multinode 3": (
        "Rendezvous: each rank registers there:\n“I am here, on this host, at this address.”",
        "会合：每个 rank 到那里登记：\n“我到了，在这台主机，用这个地址。”",
    ),
    "multinode 4": (
        "A deadline, 300 s with make train-multinode:\n"
        "then who has not come is named, and all end:",
        "用 make train-multinode 时，期限默认 300 秒。\n到期就报出缺少哪些 rank，然后全部退出：",
    ),
    "multinode 5": (
        "All have come: they compare flags, versions,\ncode and data. What differs is named.",
        "到齐之后，比对命令行参数、版本、代码和数据，\n哪一项不同就报哪一项。",
    ),
    "multinode 6": (
        "The process group: NCCL or gloo connects the\nranks. Ports of all pairs have to be open.",
        "进程组：NCCL 或 gloo 在各 rank 之间建立连接，\n两两之间的端口都要放行。",
    ),
    "multinode 7": (
        "DDP broadcasts rank 0's weights. From then on,\n"
        "of the model, only gradients and buffers travel.",
        "DDP 广播 rank 0 的权重。此后，\n模型里只有梯度和 buffer 还要传输。",
    ),
    # dataparallel
    "dataparallel": ("DataParallel and DDP, four GPUs", "DataParallel 与 DDP，四块 GPU"),
    "dataparallel desc": (
        "DataParallel: one process; in each step GPU 0 sends weights and images to the others and"
        " gathers outputs and gradients, and holds more than they do. DDP: one process per GPU,"
        " all alike, which exchange gradients only.",
        "DataParallel：一个进程；每一步 GPU 0 把权重和图像发给其他 GPU，再收回输出和梯度，占用的显"
        "存更多。DDP：每块 GPU 一个进程，彼此对等，只交换梯度。",
    ),
    "one process": (
        "one process, a thread per GPU; in memory:",
        "一个进程，每块 GPU 一个线程；显存中有：",
    ),
    "processes": ("one process per GPU; in memory:", "每块 GPU 一个进程；显存中有："),
    "batch": ("batch", "整个 batch"),
    "weights": ("weights", "权重"),
    "copy": ("copy", "临时副本"),
    "outputs": ("outputs", "全部输出"),
    "a shard": ("shard", "分片"),
    "optimizer": ("optimizer", "优化器"),
    "each step": ("between the GPUs, in each step:", "每一步在 GPU 之间："),
    "weights out": ("weights (broadcast), images (scatter)", "权重（broadcast）、图像（scatter）"),
    "outputs in": ("outputs, for the loss on GPU 0 (gather)", "输出，在 GPU 0 上算损失（gather）"),
    "outputs back": ("the outputs' gradients", "输出的梯度"),
    "gradients in": ("gradients, summed on GPU 0 (reduce)", "梯度，在 GPU 0 上求和（reduce）"),
    "gradients only": ("gradients only (all-reduce)", "只有梯度（all-reduce）"),
    "dp note": (
        "One interpreter lock for all threads; GPU 0\nholds more and does more; one machine only.",
        "所有线程共用一把 GIL；GPU 0 的显存占用\n更多、负载更重；只限单机。",
    ),
    "ddp note": (
        "All alike, no lock shared. Gradients travel\n"
        "while backward runs; on any number of machines.",
        "彼此对等，不共用锁。反向计算的同时就在传梯度；\n可以跨任意多台机器。",
    ),
    # speed
    "speed": ("Speed by number of processes", "进程数与速度"),
    "speed desc": (
        "Measured on two CPU cores: one process with two threads trains 19,342 images a second, two"
        " DDP processes with one thread each 15,724. Below, a forecast of the share of a step that"
        " is computing, from 0.95 with 2 processes to 0.02 with 1,024.",
        "在两个 CPU 核上实测：一个进程两个线程每秒 19,342 张，两个 DDP 进程各一个线程每秒 15,724 "
        "张。下图是一步中计算所占份额的预测：2 个进程 0.95，1,024 个进程 0.02。",
    ),
    "measured": ("Measured: images/s on two CPU cores", "实测：两个 CPU 核，样本/秒"),
    "measured how": (
        "AMD EPYC; fp32; MNIST; global batch 144;\ntorch 2.15.0, November 2026.\n"
        "Median of seven rounds, lowest to highest.",
        "AMD EPYC；fp32；MNIST；全局 batch 144；\ntorch 2.15.0，2026 年 11 月。\n"
        "重复 7 次的中位数，线段为最低到最高。",
    ),
    "speed 1": ("1 process, 2 threads", "1 个进程，2 个线程"),
    "speed 2": ("2 processes (DDP), 1 thread each", "2 个进程（DDP），各 1 个线程"),
    "measured note": (
        "The cores are the same two: DDP adds none, and\n"
        "its exchange takes some. GPUs: not measured.",
        "还是那两个核：DDP 没有增加算力，交换梯度还要\n占用一些。GPU 尚未实测。",
    ),
    "forecast": ("Forecast: share of a step that computes", "预测：一步中计算所占的份额"),
    "forecast how": (
        "By the formula of a ring all-reduce, 72 images\nper process; not measured.",
        "按环形 all-reduce 的公式，每进程 72 张；非实测。",
    ),
    "processes axis": ("processes", "进程数"),
    "ethernet": ("10 Gbit/s Ethernet,\nassumed", "10 Gbit/s 以太网，\n假设值"),
    "this machine": ("between processes\nof an Intel Xeon", "Intel Xeon 上的\n进程之间"),
    "forecast note": (
        "The formula leaves out that gloo's threads run\n"
        "on the cores that compute: there a real step\n"
        "took 1.27 times what it says, a quarter of it\n"
        "for the exchange, not 0.05.",
        "公式没有算 gloo 的线程也要占用计算的核，\n在 Xeon 上实测的一步是公式的 1.27 倍，通信占\n"
        "四分之一，而不是 0.05。",
    ),
}


class Figure:
    """One figure in one language: it collects shapes and texts, and writes them as an SVG."""

    def __init__(self, name: str, language: int, height: float, style: str = "") -> None:
        self.name, self.language, self.height, self.style = name, language, height, style
        self.parts: list[str] = []
        self.box(0.5, 0.5, 359, height - 1, "card", 12)
        self.text(16, 34, name, "title")

    def say(self, key: str) -> str:
        """Return the text of a key, or the key where all languages write the same."""
        return escape(TEXTS[key][self.language] if key in TEXTS else key, quote=False)

    def text(self, x: float, y: float, key: str, css: str = "", more: str = "") -> None:
        """Write a text whose first line stands on y; css centres it (c) or ends it at x (e)."""
        for row, line in enumerate(self.say(key).split("\n")):
            style = f' class="{css}"' if css else ""
            self.parts.append(f'<text x="{x:g}" y="{y + 17 * row:g}"{style}{more}>{line}</text>')

    def box(self, x: float, y: float, w: float, h: float, css: str = "", r: float = 5) -> None:
        """Draw a rounded rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" class="{css}"/>'
        )

    def cell(self, x: float, y: float, w: float, h: float, key: str, css: str = "") -> None:
        """Draw a box with a text in its middle."""
        self.box(x, y, w, h, css)
        if key:
            self.text(x + w / 2, y + h / 2 + 4.5, key, "c t")

    def rank(self, x: float, y: float, rank: int, css: str = "", r: float = 11) -> None:
        """Draw a rank as a circle with its number, or with a question mark if it is missing."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" class="r{rank} {css}"/>')
        self.text(x, y + 4.5, "?" if css == "blank" else str(rank), "c t")

    def path(self, d: str, css: str = "", more: str = "") -> None:
        """Draw a path."""
        self.parts.append(f'<path d="{d}" class="{css}"{more}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, css: str = "") -> None:
        """Draw a straight arrow."""
        self.path(f"M{x1:g} {y1:g}L{x2:g} {y2:g}" + head(x1, y1, x2, y2), f"arrow {css}")

    def svg(self) -> str:
        """Return the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 {self.height:g}" width="360"'
            f' height="{self.height:g}" role="img" aria-labelledby="t d"'
            f' lang="{("en", "zh-CN")[self.language]}">\n'
            f'<title id="t">{self.say(self.name)}</title>\n'
            f'<desc id="d">{self.say(self.name + " desc")}</desc>\n'
            f"<style>{STYLE}{self.style}</style>\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def head(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return the path of an arrow's head at its second point."""
    angle = math.atan2(y2 - y1, x2 - x1)
    ends = [(x2 - 6 * math.cos(angle + a), y2 - 6 * math.sin(angle + a)) for a in (0.55, -0.55)]
    return "M{:.1f} {:.1f}L{:g} {:g}L{:.1f} {:.1f}".format(*ends[0], x2, y2, *ends[1])


def ddp(language: int) -> Figure:
    """Draw DDP's flow of data with numbers that can be followed by hand."""
    f = Figure("ddp", language, 652)
    f.text(16, 58, "ddp task", "s")
    f.text(180, 120, "global batch", "c")
    for i in range(4):
        f.cell(78 + 52 * i, 129, 48, 28, f"x = {i + 1}", f"r{i // 2}")
    for rank, gradients, mean in ((0, ("−2", "−8"), "mean -5"), (1, ("−18", "−32"), "mean -25")):
        left, css = 16 + 172 * rank, f"r{rank}"
        middle = left + 78
        f.arrow(128 + 104 * rank, 161, middle, 182, css)
        f.box(left, 186, 156, 224, f"{css} pale", 10)
        f.text(middle, 207, f"rank {rank}", "c b")
        f.text(middle, 228, "shard", "c s")
        f.arrow(middle, 266, middle, 278, css)
        f.cell(left + 16, 282, 124, 28, "replica", css)
        f.arrow(middle, 314, middle, 326, css)
        f.text(middle, 342, "gradients", "c s")
        for i in range(2):
            f.cell(middle - 52 + 56 * i, 234, 48, 28, f"x = {2 * rank + i + 1}", css)
            f.cell(middle - 52 + 56 * i, 348, 48, 28, gradients[i], css)
        f.text(middle, 398, mean, "c b")
        f.arrow(middle, 414, middle, 428, css)
        f.arrow(middle, 486, middle, 500, css)
        f.box(left, 504, 156, 62, css, 10)
        f.text(middle, 523, "update", "c s")
        f.text(middle, 540, "1 − 0.1 × (−15)", "c")
        f.text(middle, 557, "w = 2.5", "c b")
    f.box(16, 432, 328, 50, "", 10)
    f.text(180, 453, "all-reduce mean", "c")
    f.text(180, 472, "(−5 − 25) / 2 = −15", "c b")
    f.text(16, 590, "ddp proof", "s")
    return f


def gantt(f: Figure, top: float, bars: Bars, sends: Bars) -> None:
    """Draw what two ranks compute and what the network carries."""
    for row, name in enumerate(("rank 0", "network", "rank 1")):
        y = top + 52 * row
        f.text(16, y + 20, name)
        f.path(f"M76 {y + 34}H344", "faint")
        for start, end, words, css in sends if row == 1 else bars:
            colour = "" if row == 1 else f"r{row // 2}"
            f.cell(76 + start, y + 2, end - start - 2, 28, words, f"{colour} {css}")


def buckets(language: int) -> Figure:
    """Draw when gradients are sent: while backward runs, or after it."""
    f = Figure("buckets", language, 586)
    f.text(16, 56, "not to scale", "s")
    f.text(16, 88, "large net", "b")
    f.text(132, 110, "backward", "s")
    f.text(132, 162, "all-reduces", "s")
    bars = [(0, 56, "forward", ""), (56, 82, "4", "deep"), (82, 122, "3", "deep")]
    bars += [(122, 162, "2", "deep"), (162, 202, "1", "deep")]
    sends = [(82, 106, "4", ""), (122, 156, "3", ""), (162, 196, "2", ""), (202, 236, "1", "")]
    gantt(f, 114, [*bars, (202, 236, "", "blank"), (236, 270, "step", "")], sends)
    f.text(16, 278, "large note", "s")
    f.path("M16 332H344", "faint")
    f.text(16, 360, "small net", "b")
    bars = [(0, 76, "forward", ""), (76, 162, "backward all", "deep"), (162, 236, "", "blank")]
    gantt(f, 374, [*bars, (236, 270, "step", "")], [(162, 236, "0.15 MB", "")])
    f.text(16, 538, "small note", "s")
    return f


def ring_states() -> States:
    """Return what the ranks hold at the start and after each of six steps."""
    states: States = [[[{rank} for _ in RANKS] for rank in RANKS]]
    for step in range(6):
        held = [list(chunks) for chunks in states[-1]]
        for rank in RANKS:
            chunk, to = (rank - step) % 4, (rank + 1) % 4
            held[to][chunk] = states[-1][rank][chunk] | states[-1][to][chunk]
        states.append(held)
    return states


def ring_style() -> str:
    """Return the animation: start, six steps and end, of two seconds each."""
    rules = [
        "@media(prefers-reduced-motion:no-preference){",
        "@keyframes now{0%,12.4%{opacity:1}12.5%,to{opacity:0}}",
        "@keyframes go{0%,10%{transform:none}70%,to{transform:translate(var(--x),var(--y))}}",
        "@keyframes busy{0%,12.4%,87.5%,to{opacity:0}12.5%,87.4%{opacity:1}}",
        ".now,.now.last{animation:now 16s infinite}",
        ".go{animation:busy 16s infinite}.go g{animation:go 2s infinite}",
    ]
    for step in range(1, 7):
        at = (step + 0.7) / 8 * 100
        hidden, shown = f"0%,{at:.1f}%{{opacity:0}}", f"{at + 1:.1f}%,to{{opacity:1}}"
        rules.append(f"@keyframes s{step}{{{hidden}{shown}}}")
        rules.append(f".s{step}{{animation:s{step} 16s infinite}}")
    return ".now,.go{opacity:0}.now.last{opacity:1}" + "".join([*rules, "}"])


def squares(places: Places, w: float, h: float) -> str:
    """Return the path of rectangles at these places."""
    return "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h-{w:g}z" for x, y in places)


def phase(number: int) -> str:
    """Return the attribute that shows a part in one phase of the animation only."""
    return f' style="animation-delay:{2 * number - 16}s"'


def ring_moving(f: Figure, states: States) -> None:
    """Draw the four ranks, whose cells fill up, and the chunks that travel between them."""
    for rank in RANKS:
        left, top = (16, 248)[rank in (1, 2)], (96, 262)[rank in (2, 3)]
        f.box(left, top, 96, 104, f"r{rank} pale", 8)
        f.text(left + 48, top + 18, f"rank {rank}", "c b")
        for chunk in RANKS:
            f.text(left + 18 + 20 * chunk, top + 36, "abcd"[chunk], "c s")
        slots = [(left + 9.5 + 20 * c, top + 41.5 + 14 * part) for c in RANKS for part in RANKS]
        f.path(squares(slots, 17, 11), "faint")
        for part in RANKS:
            cells: dict[int, Places] = {}
            for chunk in RANKS:
                first = next(s for s in range(7) if part in states[s][rank][chunk])
                place = (left + 9.0 + 20 * chunk, top + 41.0 + 14 * part)
                cells.setdefault(first, []).append(place)
            for first, places in cells.items():
                f.path(squares(places, 18, 12), f"solid r{part} s{first}")
    ways = [(132, 148, 96, 0), (296, 213, 0, 36), (228, 314, -96, 0), (64, 249, 0, -36)]
    for rank, (x, y, dx, dy) in enumerate(ways):
        bend = 16 if dx > 0 else -16 if dx else 0, 10 if dy > 0 else -10 if dy else 0
        f.arrow(x - bend[0], y - bend[1], x + dx + bend[0], y + dy + bend[1])
        f.parts.append(f'<g class="go" style="--x:{dx}px;--y:{dy}px"><g>')
        f.box(x - 10, y - 10, 20, 20, "card")
        f.box(x - 10, y - 10, 20, 20, f"r{rank} deep")
        for step in range(6):
            f.text(x, y + 4.5, "abcd"[(rank - step) % 4], "now c b", phase(step + 1))
        f.parts.append("</g></g>")
    names = ["", *["reduce-scatter"] * 3, *["all-gather"] * 3, ""]
    titles = ["ring start", *(f"ring {n}" for n in range(1, 7)), "ring end"]
    for number, (title, name) in enumerate(zip(titles, names, strict=True)):
        last = " last" if number == 7 else ""
        f.text(180, 227, title, f"now c b{last}", phase(number))
        f.text(180, 246, name, f"now c s{last}", phase(number))


def ring(language: int) -> Figure:
    """Draw a ring all-reduce: animated above, below a table of all its steps."""
    f = Figure("ring", language, 802, ring_style())
    f.text(16, 58, "ring task", "s")
    states = ring_states()
    ring_moving(f, states)
    f.path("M16 386H344", "faint")
    for rank in RANKS:
        f.text(149 + 56 * rank, 408, f"rank {rank}", "c s")
    frames: Places = []
    filled: dict[int, Places] = {rank: [] for rank in RANKS}
    for step, state in enumerate(states):
        top = 416 + 38 * step + 22 * (step > 0) + 22 * (step > 3)
        if step in (1, 4):
            f.text(16, top - 6, ("adding", "passing")[step > 3], "b t")
        f.box(8, top - 1, 344, 36, "now pale", 6)
        f.parts[-1] = f.parts[-1].replace("/>", phase(step) + "/>")
        f.text(16, top + 21, f"ring {step}" if step else "ring start", "t")
        for rank in RANKS:
            for chunk in RANKS:
                for part in state[rank][chunk]:
                    filled[part].append((129 + 56 * rank + 10 * chunk, top + 3 + 7.5 * part))
            frames.append((127 + 56 * rank, top + 1))
    f.path(squares(frames, 43, 33), "faint")
    for part, places in filled.items():
        f.path(squares(places, 9, 6.5), f"solid r{part}")
    f.text(16, 756, "ring note", "s")
    return f


def grid(f: Figure, x: float, y: float, rows: Rows) -> None:
    """Draw what each rank holds."""
    for rank, row in enumerate(rows):
        top = y + 22 * rank
        f.rank(x + 2, top + 9, rank, r=9)
        for i, (words, whose) in enumerate(row):
            w, css = (45, "sum") if whose == 4 else (21, f"r{whose}")
            f.cell(x + 20 + 24 * i, top, w, 18, words, css)
        if not row:
            f.box(x + 20, top, 21, 18, "blank faint")


def collectives(language: int) -> Figure:
    """Draw what four ranks hold before and after each collective."""
    style = ".sum{fill:url(#sum);fill-opacity:.45}" + "".join(
        f".o{rank}{{stop-color:var(--r{rank})}}" for rank in RANKS
    )
    f = Figure("collectives", language, 1106, style)
    stops = (f'<stop offset="{at / 4}" class="o{at - end}"/>' for at in range(5) for end in (1, 0))
    f.parts.append(f'<linearGradient id="sum">{"".join([*stops][1:-1])}</linearGradient>')
    f.text(16, 58, "collectives task", "s")
    parts = "ABCD"
    none: Rows = [[], [], []]
    own = [[(parts[rank], rank)] for rank in RANKS]
    everything = [(parts[rank], rank) for rank in RANKS]
    numbers = [[(str(rank + 1), rank)] for rank in RANKS]
    table = [[(str(rank + i + 1), rank) for i in RANKS] for rank in RANKS]
    sums = [[(str(10 + 4 * i), 4)] for i in RANKS]
    cases: dict[str, tuple[Rows, Rows]] = {
        "broadcast": ([[("A", 0)], *none], [[("A", 0)]] * 4),
        "scatter": ([[(p, 0) for p in parts], *none], [[(p, 0)] for p in parts]),
        "gather": (own, [everything, *none]),
        "all_gather": (own, [everything] * 4),
        "reduce": (numbers, [[("10", 4)], *none]),
        "all_reduce": (numbers, [[("10", 4)]] * 4),
        "reduce_scatter": (table, sums),
    }
    for n, (name, (before, after)) in enumerate(cases.items()):
        top = 96 + 144 * n
        f.path(f"M16 {top}H344", "faint")
        f.text(16, top + 22, name, "b")
        f.text(16, top + 39, f"{name} use", "s")
        grid(f, 24, top + 48, before)
        f.arrow(162, top + 90, 198, top + 90)
        grid(f, 220, top + 48, after)
    return f


PLACES = (54, 134, 226, 306)  # where the four ranks of two nodes stand


def nodes(f: Figure, y: float, h: float, ranks_y: float, absent: bool = False) -> None:
    """Draw two nodes with two ranks each, the last one perhaps missing."""
    for node in range(2):
        f.box(16 + 172 * node, y, 156, h, "pale", 8)
    for rank, x in enumerate(PLACES):
        f.rank(x, ranks_y, rank, "blank" if absent and rank == 3 else "")


def arc(f: Figure, rank: int, other: int, y: float, css: str) -> None:
    """Draw an arc between two ranks whose circles have their tops at y."""
    x1, x2 = PLACES[rank], PLACES[other]
    rise = 14 + abs(x2 - x1) / 7
    f.path(f"M{x1} {y}C{x1 + 12} {y - rise} {x2 - 12} {y - rise} {x2} {y}", f"arrow {css}")


def beginnings(f: Figure) -> None:
    """Draw what launchers set, the store, and the ranks that register there."""
    nodes(f, 92, 110, 166)
    for node in range(2):
        middle = 94 + 172 * node
        f.text(middle, 109, f"node {node}", "c s")
        f.cell(middle - 36, 117, 72, 22, "launcher")
        for x in PLACES[2 * node : 2 * node + 2]:
            f.arrow(middle, 141, x, 153)
    for rank, x in enumerate(PLACES):
        f.text(x, 194, f"RANK={rank}", "c m")
    f.box(16, 208, 328, 42, "pale", 8)
    f.text(26, 225, "WORLD_SIZE=4 MASTER_ADDR=192.168.1.201", "m")
    f.text(26, 242, "MASTER_PORT=12345 LOCAL_RANK=0 | 1", "m")
    for top in (308, 442):
        nodes(f, top, 76, top + 20)
        f.cell(58, top + 46, 72, 22, "store", "r0")
    f.arrow(62, 340, 71, 351, "r0")
    for rank, end in enumerate(((72, 485), (116, 485), (133, 494), (133, 503))):
        x = PLACES[rank]
        angle = math.atan2(end[1] - 462, end[0] - x)
        f.arrow(x + 14 * math.cos(angle), 462 + 14 * math.sin(angle), *end, f"r{rank}")


def multinode(language: int) -> Figure:
    """Draw how the ranks of two machines find each other."""
    f = Figure("multinode", language, 1120)
    for n, top in enumerate((52, 268, 402, 538, 688, 826, 966), 1):
        f.parts.append(f'<circle cx="27" cy="{top + 12}" r="11"/>')
        f.text(27, top + 16.5, str(n), "c b t")
        f.text(46, top + 8, f"multinode {n}", "t")
    beginnings(f)
    nodes(f, 578, 40, 598, absent=True)
    f.box(16, 624, 328, 42, "pale", 8)
    f.text(26, 641, "3 of 4 processes came within 300 s;", "m")
    f.text(26, 658, "missing: rank 3", "m")
    nodes(f, 728, 76, 748)
    for rank, x in enumerate(PLACES):
        f.box(x - 18, 766, 36, 28, f"r{rank}", 3)
        f.path(f"M{x - 11} 774h22m-22 6h15m-15 6h19", f"r{rank}")
        if rank:
            f.text((x + PLACES[rank - 1]) / 2, 785, "=", "c b")
    nodes(f, 866, 76, 922)
    for rank, other in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        arc(f, rank, other, 909, "")
    nodes(f, 1006, 100, 1062)
    for rank, x in enumerate(PLACES):
        if rank:
            arc(f, 0, rank, 1049, "r0")
            f.path(head(x - 5, 1042, x, 1049), "arrow r0")
        f.cell(x - 12, 1079, 24, 20, "w", "r0")
    return f


def gpus(f: Figure, top: float, held: list[list[str]]) -> None:
    """Draw four GPUs and what is in their memories, from the bottom."""
    for rank, words in enumerate(held):
        x = 20 + 83 * rank
        f.text(x + 35.5, top - 6, f"GPU {rank}", "c t")
        f.box(x, top, 71, 92, f"r{rank} pale")
        for i, word in enumerate(words):
            f.cell(x + 3, top + 68 - 22 * i, 65, 21, word, f"r{rank}")


def lane(f: Figure, y: float, words: str, senders: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Draw what goes from some GPUs to others."""
    f.text(180, y - 9, words, "c t")
    f.path(f"M55.5 {y}H304.5", "arrow")
    for rank in senders:
        f.parts.append(f'<circle cx="{55.5 + 83 * rank}" cy="{y}" r="4" class="solid r{rank}"/>')
    for rank in to:
        f.path(head(56 + 83 * rank - (rank > 0), y, 55.5 + 83 * rank, y), "arrow")


def dataparallel(language: int) -> Figure:
    """Draw what travels between four GPUs under DataParallel, and under DDP."""
    f = Figure("dataparallel", language, 748)
    f.text(16, 64, "DataParallel", "b")
    f.text(16, 82, "one process", "s")
    f.box(16, 92, 328, 292, "pale", 8)
    gpus(f, 118, [["weights", "optimizer", "batch", "outputs"], *[["copy", "a shard"]] * 3])
    f.text(180, 236, "each step", "c s")
    lane(f, 268, "weights out", (0,), (1, 2, 3))
    lane(f, 302, "outputs in", (1, 2, 3), (0,))
    lane(f, 336, "outputs back", (0,), (1, 2, 3))
    lane(f, 370, "gradients in", (1, 2, 3), (0,))
    f.text(16, 406, "dp note", "s")
    f.path("M16 442H344", "faint")
    f.text(16, 470, "DDP", "b")
    f.text(16, 488, "processes", "s")
    for rank in RANKS:
        f.box(16 + 83 * rank, 498, 79, 124, f"r{rank} pale", 8)
    gpus(f, 524, [["weights", "optimizer", "a shard"]] * 4)
    f.text(180, 644, "each step", "c s")
    lane(f, 676, "gradients only", (0, 1, 2, 3), ())
    for x in (55.5, 138.5, 221.5):
        f.path(head(x + 9, 676, x + 8, 676) + head(x + 74, 676, x + 75, 676), "arrow")
    f.text(16, 712, "ddp note", "s")
    return f


# From benchmarks.md: "Why DDP" (median, lowest, highest), and the forecast's two columns.
MEASURED = ((19342, 17624, 20758), (15724, 14265, 17909))
LONGEST = 21_000  # images/s at the right end
HERE = (0.95, 0.87, 0.76, 0.61, 0.43, 0.27, 0.16, 0.09, 0.04, 0.02)
ETHERNET = (0.96, 0.90, 0.82, 0.69, 0.53, 0.36, 0.22, 0.12, 0.07, 0.03)


def speed(language: int) -> Figure:
    """Draw measured speeds and the forecast for more processes."""
    f = Figure("speed", language, 716)
    f.text(16, 64, "measured", "b")
    f.text(16, 82, "measured how", "s")
    for images in range(0, LONGEST, 5000):
        left = 16 + 328 * images / LONGEST
        anchor = "c" if images else ""
        f.path(f"M{left:g} 158v28m0 22v32", "faint")
        f.text(left, 256, f"{images:,}", f"s {anchor}")
    for row, (median, low, high) in enumerate(MEASURED):
        y = 160 + 50 * row
        f.text(16, y - 7, f"speed {row + 1}", "t")
        width = 328 * median / LONGEST / (row + 1)  # of each process
        for rank in range(row + 1):
            f.box(16 + width * rank, y, width, 24, f"r{rank} deep", 0)
        f.text(24, y + 16.5, f"{median:,}", "b t")
        ends = [16 + 328 * value / LONGEST for value in (low, high)]
        f.path("M{0:g} {2}v10m0-5H{1:g}m0-5v10".format(*ends, y + 7), "arrow ink")
    f.text(16, 280, "measured note", "s")
    f.path("M16 316H344", "faint")
    f.text(16, 344, "forecast", "b")
    f.text(16, 362, "forecast how", "s")
    for share in (0, 0.25, 0.5, 0.75, 1):
        f.path(f"M46 {580 - 180 * share:g}H344", "faint")
        f.text(40, 584 - 180 * share, f"{share:g}", "s e")
    for n in (1, 3, 5, 7, 9):
        f.text(56 + 30 * (n - 1), 598, f"{2**n}", "s c")
    f.text(344, 616, "processes axis", "s e")
    for values, css in ((ETHERNET, "ink"), (HERE, "ink dashed")):
        points = [(56 + 30 * n, 580 - 180 * share) for n, share in enumerate(values)]
        f.path("M" + "L".join(f"{left} {top:g}" for left, top in points), f"arrow {css}")
        for left, top in points:
            f.parts.append(f'<circle cx="{left}" cy="{top:g}" r="3" class="solid ink"/>')
    f.text(194, 466, "ethernet", "t")
    f.text(56, 528, "this machine", "t")
    f.text(16, 642, "forecast note", "s")
    return f


def main(folder: Path = Path(__file__).parent / "figures") -> None:
    """Write every figure in both languages."""
    for draw in (ddp, buckets, ring, collectives, multinode, dataparallel, speed):
        for language, code in enumerate(("en", "zh")):
            figure = draw(language)
            (folder / f"{figure.name}.{code}.svg").write_text(figure.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
