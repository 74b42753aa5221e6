"""The Chinese words of the drawings.

What PyTorch, a command or a log calls something keeps its name. Any other word needs a row in `WORDS`: without one, the
drawing is not made.
"""

import re

FONTS = "'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
NAMES = {
    *("rank", "local_rank", "group_rank", "world", "world_size", "nnodes", "stage", "src", "dst", "SUM", "t"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("broadcast", "scatter", "gather", "reduce", "replicate", "reduce_scatter", "all_gather", "all_reduce"),
    *("new_group", "nn.DataParallel", "DataLoader", "optimizer.step", "cuda", "fork", "BERT", "CLS"),
}
LETTERS = re.compile(r"[abcFB]\d?")  # tensors and their chunks; forward and backward of a micro-batch
WORDS = {  # of a line in English; # stands for a number
    "# GPU": "# 块 GPU",
    "# micro-batch": "# 个微批次",
    "# micro-batches": "# 个微批次",
    "# process": "# 个进程",
    "# processes": "# 个进程",
    "#  backward, in threads": "#  各线程反向传播",
    "#  forward, in threads": "#  各线程前向传播",
    "#  gather, loss": "#  gather，计算损失",
    "#  to the first device": "#  送到第一个设备",
    "#. data": "#. 数据",
    "#. loss": "#. 损失",
    "#. metric": "#. 指标",
    "#. model": "#. 模型",
    "MASTER_ADDR = node #, MASTER_PORT = #": "MASTER_ADDR = 节点 #，MASTER_PORT = #",
    "activations  →    ←  gradients": "激活值  →    ←  梯度",
    "after a write": "自己的副本",
    "all_reduce(gradients)": "all_reduce（梯度）",
    "backward": "反向传播",
    "batch": "批次",
    "batch / #": "1/# 批次",
    "batch, model": "批次、模型",
    "chunk #": "块 #",
    "compute": "计算",
    "copy": "副本",
    "discriminator": "判别器",
    "fake": "假样本",
    "generator": "生成器",
    "gradients": "梯度",
    "gradients #": "梯度 #",
    "killed, restarted, same bits": "丢失后重启，结果逐比特相同",
    "large batch": "大批次",
    "layer #": "第 # 层",
    "layers #, #": "第 #、# 层",
    "model": "模型",
    "model, batch,": "模型、批次、",
    "nccl: CUDA tensors, gloo: CPU tensors": "nccl：CUDA 张量，gloo：CPU 张量",
    "new model": "更新后的模型",
    "nn.DataParallel: # process": "nn.DataParallel：# 个进程",
    "node #": "节点 #",
    "node # = group_rank #": "节点 # = group_rank #",
    "output #": "输出 #",
    "output, loss": "输出、损失",
    "outputs, loss": "输出、损失",
    "own copy": "写入之后",
    "positive": "好评",
    "real": "真样本",
    "shared pages": "共享的内存页",
    "small batch": "小批次",
    "step": "更新参数",
    "sum of gradients": "梯度之和",
    "tensor": "张量",
    "thread #": "线程 #",
    "thread #: cuda:#": "线程 #：cuda:#",
    "worker #": "加载进程 #",
}


def translated(svg: str) -> str:
    """The same drawing in Chinese; raises LookupError on a word that is neither in `WORDS` nor a name."""
    svg = svg.replace('font-family="sans-serif"', f'font-family="{FONTS}"')
    return re.sub(r"(?<=>)[^<>\n]+(?=</text>)", lambda line: translation(line[0]), svg)


def translation(line: str) -> str:
    """A line of a drawing, in Chinese."""
    numbers = iter(re.findall(r"\d+", line))
    if words := WORDS.get(re.sub(r"\d+", "#", line)):
        return re.sub("#", lambda _: next(numbers), words)
    unknown = [
        word for word in re.findall(r"[A-Za-z][\w.]*", line) if word not in NAMES and not LETTERS.fullmatch(word)
    ]
    if unknown:
        raise LookupError(f"{line!r} has no translation in WORDS, docs/chinese.py, and {unknown} no place in NAMES")
    return line
