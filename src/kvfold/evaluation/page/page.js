"use strict";
// A click on a heading sorts its table by that column's numbers; cells without one come last.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      const number = (row) => parseFloat(row.cells[column].dataset.value);
      const order = (first, second) => {
        const [a, b] = [number(first), number(second)];
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return down ? b - a : a - b;
      };
      table.tBodies[0].append(...rows.sort(order));
    });
  });
}
