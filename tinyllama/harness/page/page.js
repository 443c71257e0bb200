"use strict";
// Tables are sorted by a click on a header and filtered by words. Without this script all is there.
const text = (cell) => [...cell.childNodes].filter((node) => node.nodeName !== "SMALL")
  .map((node) => node.textContent).join("").trim();
const number = (value) => parseFloat(value.replace(/[,≥≤ ]/g, ""));
const compare = (one, other) => {
  const [a, b] = [number(one), number(other)];
  return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other, "en", { numeric: true }) : a - b;
};
const sort = (head, body) => {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const keyed = [...body.rows].map((row) => {
    const cell = row.cells[head.cellIndex];
    return [cell && cell.colSpan === 1 ? text(cell) : "–", row];
  });
  const known = keyed.filter(([value]) => value !== "–");
  known.sort(([one], [other]) => (down ? compare(other, one) : compare(one, other)));
  body.append(...[...known, ...keyed.filter((pair) => !known.includes(pair))].map(([, row]) => row));
};
for (const scroll of document.querySelectorAll(".scroll")) {
  const table = scroll.querySelector("table"), body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, body));
    head.append(button);
  }
  if (body.rows.length < 8) continue;
  const words = document.createElement("input");
  words.type = "search";
  words.placeholder = "filter";
  words.setAttribute("aria-label", `Filter: ${table.caption.textContent}`);
  words.addEventListener("input", () => {
    const wanted = words.value.toLowerCase().split(" ");
    for (const row of body.rows) {
      const found = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => found.includes(word));
    }
  });
  scroll.before(words);
}
