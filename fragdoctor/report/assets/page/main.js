// Puts the page together: theme, device switch, copy buttons, explorer, address.

/** @type {any} */
const page = { explorer: null, timeline: null, map: null, icicle: null, device: null, ready: false };
/** @type {any} */ (window).fragdoctor = page;

function redraw() {
  theme.read();
  if (page.explorer) page.explorer.redraw();
}

// Paper is white and cannot be clicked: use light colors, open every section, redraw to its width.
function setUpPrinting() {
  let before = null, closed = [];
  window.addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme || "";
    document.documentElement.dataset.theme = "light";
    closed = /** @type {HTMLDetailsElement[]} */ ([...document.querySelectorAll("details:not([open]):not(.stack)")]);
    for (const node of closed) node.open = true;
    theme.read();
    if (page.map) page.map.print(true);
    if (page.explorer) page.explorer.paint();
  });
  window.addEventListener("afterprint", () => {
    if (before) document.documentElement.dataset.theme = before;
    else delete document.documentElement.dataset.theme;
    for (const node of closed) node.open = false;
    if (page.map) page.map.print(false);
    redraw();
  });
}

function showDevice(device, decoded) {
  page.device = device;
  for (const node of elements(".device[data-device]")) node.classList.toggle("off", node.dataset.device !== device);
  for (const node of elements("#devices button")) node.setAttribute("aria-pressed", node.dataset.show === device ? "true" : "false");
  const data = decoded.head.devices[device] || { timeline: null, map: null, icicle: null, lives: null };
  const explorer = page.explorer = new Explorer(data, decoded, device);
  Object.assign(page, { timeline: explorer.timeline, map: explorer.map, icicle: explorer.icicle });
  if (byId("timeline-unit")) byId("timeline-unit").textContent = data.timeline ? unitText(data.timeline) : "";
}

function unitText(timeline) {
  const grain = timeline.bucket === 1 ? "each one exact" : `highest and lowest of every ${formatCount(timeline.bucket)}`;
  return `${plural(timeline.n_events, "event")}, ${grain}`;
}

function place(name, data, make) {
  const root = byId(`${name}-graphic`), none = byId(`${name}-none`);
  if (!root) return null;
  root.hidden = !data;
  if (none) none.hidden = Boolean(data);
  if (!data) { root.replaceChildren(); return null; }
  return make(root);
}

// The address keeps what is shown, so that a link shows the same. "#checklist" stays an anchor.
let isRestoring = false, saving = null;

function saveAddress() {
  if (isRestoring || saving !== null) return;
  saving = setTimeout(() => {
    saving = null;
    const parts = page.explorer.address();
    if (byId("devices")) parts.set("show", page.device);
    const text = parts.toString();
    const isPlace = location.hash.length > 1 && !location.hash.includes("=");
    if (!text && (isPlace || !location.hash)) return;
    try { history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search); } catch { /* some hosts forbid it */ }
  }, 150);
}

function restoreAddress(decoded) {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (!location.hash.includes("=") || !page.explorer) return;
  isRestoring = true;
  const device = parts.get("show");
  if (device !== null && device !== page.device && Object.hasOwn(decoded.head.devices, device)) showDevice(device, decoded);
  page.explorer.restore(parts);
  isRestoring = false;
}

async function start() {
  setUpTheme(redraw);
  setUpCopying();
  setUpPrinting();
  for (const table of document.querySelectorAll("section table")) if (!table.closest("#explorer")) makeSortable(table);
  const encoded = byId("data").textContent.trim();
  if (encoded) await draw(encoded);
  page.ready = true;
}

async function draw(encoded) {
  try {
    const decoded = await decodePage(encoded);
    decoded.text = new TextTables(decoded.head.text, decoded.array);
    const shown = elements("#devices button");
    for (const node of shown) node.addEventListener("click", () => {
      const place = page.explorer.placeInTwin();
      showDevice(node.dataset.show, decoded);
      if (place !== null) page.explorer.goTo(place);
      saveAddress();
    });
    showDevice(decoded.head.device, decoded);
    restoreAddress(decoded);
    addEventListener("hashchange", () => restoreAddress(decoded));
    addEventListener("keydown", (e) => page.explorer.key(e));
  } catch (error) {
    byId("trouble").hidden = false;
    console.error(error);
  }
}

start();
