// Pages without a recording: their tables sort, and names of ranks lead to their rows.

// "rank 5" in a heading links to its row of the table.
function linkRanks() {
  const rows = new Map();
  for (const row of /** @type {NodeListOf<HTMLTableRowElement>} */ (document.querySelectorAll("#ranks tbody tr"))) {
    const name = row.cells[0] ? row.cells[0].textContent.trim() : "";
    if (!name || rows.has(name)) continue;
    rows.set(name, row);
    row.id = `row-${rows.size}`;
  }
  for (const head of document.querySelectorAll("#odd h3 b, #odd .body > p b")) {
    const row = rows.get(head.textContent.trim());
    if (!row || head.querySelector("a")) continue; // already links to the rank's page
    head.replaceChildren(element("a", { href: `#${row.id}`, title: "To its row in the table of ranks" }, head.textContent));
  }
}

setUpTheme(() => {});
setUpCopying();
for (const table of document.querySelectorAll("section table")) makeSortable(table);
linkRanks();
/** @type {any} */ (window).fragdoctor = { ready: true };
