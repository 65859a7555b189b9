"""Is a concentrated deposit related to accuracy on longer texts? Rank correlations over small models."""

from __future__ import annotations

import pandas as pd
from shared.deposits import NAMES, markdown
from shared.rank_correlations import CONTROLS, interval, permuted
from shared.rows import TABLES

CONCENTRATION = {"share": 1, "effective_heads": -1}


def correlations(table: pd.DataFrame, of: str = "accuracy") -> pd.DataFrame:
    """Rank correlation of a deposit's concentration and accuracy on longer texts, one row per measure and length."""
    rows = []
    for mode in ("zero", "mean"):
        for measure, sign in CONCENTRATION.items():
            known = table.assign(x=sign * table[f"{mode}_{of}_{measure}"]).dropna(subset="x")
            for length in ("1.5", "2"):
                words = "zeroed" if mode == "zero" else "mean", measure.replace("_", " ").replace("eff", "fewer eff")
                row = dict(zip(("heads", "concentration"), words, strict=True)) | {"length": length}
                for name in CONTROLS:
                    row[name] = "{:+.2f} ({:+.2f}, {:+.2f})".format(*interval(known, "x", f"accuracy_{length}", name))
                row["permuted within kinds: p"] = f"{permuted(known, 'x', f'accuracy_{length}'):.2f}"
                rows.append(row)
    return pd.DataFrame(rows)


def by_encoding(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the models of an encoding ± their standard deviation."""
    columns = {f"accuracy_{length}": f"accuracy at {length} times the length" for length in ("1", "1.5", "2")}
    rows = []
    for encoding, models in table.groupby("encoding"):
        row = {"encoding": NAMES[str(encoding)], "models": len(models)}
        for name, shown in columns.items():
            row[shown] = f"{models[name].mean():.2f}±{models[name].std():.2f}"
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    """Print the page's tables: means by encoding, and the share of the largest drop at 1.5 times the length."""
    table = pd.read_csv(TABLES / "deposit_and_length.csv")
    shown = correlations(table).query("concentration == 'share' and length == '1.5'")
    print(
        markdown(by_encoding(table)), markdown(shown.drop(columns=["concentration", "length", CONTROLS[0]])), sep="\n\n"
    )
