// What every page does: light and dark themes, copying, and tables that sort.

const byId = (id) => document.getElementById(id);

/** @returns {HTMLElement[]} the elements that a selector finds */
const elements = (selector) => [...document.querySelectorAll(selector)];

function stored(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch {
    return null; // a file opened from disk may have no storage
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** @param {() => void} onTheme called when the colors have changed */
function setUpTheme(onTheme) {
  const chosen = stored("fragdoctor-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  const toggle = byId("theme");
  const label = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  toggle.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    stored("fragdoctor-theme", document.documentElement.dataset.theme);
    label();
    onTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); onTheme(); });
  label();
  theme.read();
  // Elements that stick below the bar, and link targets, depend on the bar's height.
  const [bar] = elements(".top");
  new ResizeObserver(() => document.documentElement.style.setProperty("--top", `${bar.offsetHeight}px`)).observe(bar);
}

function setUpCopying() {
  for (const control of elements(".copy")) {
    control.addEventListener("click", async () => {
      const source = control.previousElementSibling;
      try {
        await navigator.clipboard.writeText(source.textContent);
      } catch {
        getSelection().selectAllChildren(source);
        document.execCommand("copy");
      }
      control.textContent = "Copied";
      setTimeout(() => { control.textContent = "Copy"; }, 1500);
    });
  }
}

// The tables of the report: a click on a heading sorts, by size or number if cells hold those.
function cellValue(text) {
  const m = /^\s*([-−+]?[\d,]*\.?\d+)\s*(B|KiB|MiB|GiB|TiB|%|s|ms)?\b/.exec(text);
  if (!m) return null;
  return Number(m[1].replaceAll(",", "").replace("−", "-")) * ({ KiB: KIB, MiB: MIB, GiB: GIB, TiB: TIB, ms: 0.001 }[m[2]] || 1);
}

function makeSortable(table) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, at) => {
    if (!head.textContent.trim()) return;
    const title = head.textContent, control = button(title, `Sort by ${title}`, () => {
      const isUp = head.getAttribute("aria-sort") === "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      const body = table.tBodies[0], rows = [...body.rows].map((row) => { const text = row.cells[at] ? row.cells[at].textContent.trim() : ""; return { row, text, value: cellValue(text) }; });
      const isNumeric = rows.filter((r) => r.value !== null).length * 2 >= rows.length, sign = isUp ? 1 : -1;
      rows.sort((a, b) => sign * (isNumeric ? (a.value ?? -Infinity) - (b.value ?? -Infinity) : -a.text.localeCompare(b.text)));
      body.append(...rows.map((r) => r.row));
    });
    head.replaceChildren(control);
  });
}
