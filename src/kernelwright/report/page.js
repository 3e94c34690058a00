"use strict";
// Everything a candidate wrote is set as text nodes: no markup is ever made from it.
(() => {
  const details = JSON.parse(document.getElementById("details").textContent);
  const CONTEXT_LINES = 3;
  const table = document.querySelector("table.evaluations");

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  // --- generic values -------------------------------------------------------------------------

  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const asText = (value) => (value === null ? "none" : value === true ? "yes" : value === false ? "no" : String(value));
  const isPlain = (value) => !Array.isArray(value) && !isObject(value);
  const isShort = (value) => isPlain(value) || (Array.isArray(value) && value.every(isPlain));

  // {error: {rms, worst}} as two columns.
  const flat = (line) =>
    Object.fromEntries(Object.entries(line).flatMap(([name, value]) =>
      isObject(value) ? Object.entries(value).map(([part, item]) => [`${name} ${part}`, item]) : [[name, value]]));

  const gridOf = (nested) => {
    const lines = nested.map(flat);
    const columns = [...new Set(lines.flatMap((line) => Object.keys(line)))];
    const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
    const body = lines.map((line) => make("tr", {}, ...columns.map((name) => make("td", {}, show(line[name] ?? "")))));
    return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  };

  const show = (value) => {
    if (Array.isArray(value)) {
      if (value.length && value.every(isObject)) return gridOf(value);
      if (value.every(isPlain)) return value.length ? value.map(asText).join(", ") : "none";
      return make("ul", {}, ...value.map((item) => make("li", {}, show(item))));
    }
    if (!isObject(value)) return asText(value);
    const items = Object.entries(value);
    if (items.length > 1 && items.every(([, item]) => isObject(item))) {
      return gridOf(items.map(([name, item]) => ({ name, ...item })));
    }
    return pairs(items);
  };

  const pairs = (items) =>
    make("dl", { class: "pairs" }, ...items.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, show(value))]));

  // --- code -----------------------------------------------------------------------------------

  const columnsOf = (...classes) => make("colgroup", {}, ...classes.map((name) => make("col", { class: name })));

  const sourceTable = (lines) => {
    const body = lines.map((text, index) =>
      make("tr", {}, make("td", { class: "line" }, String(index + 1)), make("td", {}, text)));
    return make("div", { class: "code", tabindex: "0" },
      make("table", {}, columnsOf("line", ""), make("tbody", {}, ...body)));
  };

  const side = (lines, index, kind) =>
    index === null
      ? [make("td", { class: "line" }), make("td")]
      : [make("td", { class: "line" }, String(index + 1)), make("td", { class: kind || "same" }, lines[index])];

  const differenceRows = (before, after, spans) => {
    const rows = [];
    spans.forEach(([tag, oldStart, oldEnd, newStart, newEnd], place) => {
      const count = Math.max(oldEnd - oldStart, newEnd - newStart);
      const lead = place === 0 ? 0 : CONTEXT_LINES;
      const trail = place === spans.length - 1 ? 0 : CONTEXT_LINES;
      for (let offset = 0; offset < count; offset += 1) {
        const hidden = count - lead - trail;
        if (tag === "equal" && offset === lead && hidden > 1) {
          const word = make("td", { colspan: "4" }, `${hidden} unchanged lines`);
          rows.push(make("tr", { class: "skipped" }, word));
          offset = count - trail - 1;
          continue;
        }
        const old = oldStart + offset < oldEnd ? oldStart + offset : null;
        const fresh = newStart + offset < newEnd ? newStart + offset : null;
        const changed = tag !== "equal";
        rows.push(make("tr", {}, ...side(before, old, changed ? "removed" : ""), ...side(after, fresh, changed ? "added" : "")));
      }
    });
    return rows;
  };

  const differenceTable = (before, after, spans, name) => {
    const head = make("tr", {},
      make("th", { colspan: "2", scope: "col" }, name), make("th", { colspan: "2", scope: "col" }, "this candidate"));
    return make("div", { class: "code", tabindex: "0" },
      make("table", {}, columnsOf("line", "", "line", ""), make("thead", {}, head),
        make("tbody", {}, ...differenceRows(before, after, spans))));
  };

  const codeViews = (entry) => {
    const views = [];
    const source = entry.source === null ? null : details.texts[entry.source];
    for (const [key, name] of [["reference", "the reference"], ["parent", "the candidate it came from"]]) {
      const change = entry[key];
      if (!change) continue;
      views.push([`Against ${name}`, () => change.spans === null
        ? make("p", {}, "Too long to compare here.")
        : differenceTable(details.texts[change.before], source, change.spans, name)]);
    }
    if (source) views.push(["Full source", () => sourceTable(source)]);
    return views;
  };

  const codePanel = (entry) => {
    const views = codeViews(entry);
    if (!views.length) return make("p", { class: "faint" }, "Its source is not recorded.");
    const place = make("div");
    const buttons = views.map(([name, draw]) => {
      const button = make("button", { type: "button", "aria-pressed": "false" }, name);
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        place.replaceChildren(draw());
      });
      return button;
    });
    buttons[0].click();
    return make("div", {}, make("div", { class: "tabs", role: "group", "aria-label": "Code" }, ...buttons), place);
  };

  // --- a row's detail -------------------------------------------------------------------------

  const detailOf = (entry) => {
    const { detail, ...facts } = entry.facts;
    const parts = [];
    if (detail) parts.push(make("h3", {}, "What the judge says"), make("pre", { class: "message", tabindex: "0" }, detail));
    parts.push(make("h3", {}, "Record"), pairs(Object.entries(facts).filter(([, value]) => value !== "")));
    if (entry.processes.length) parts.push(make("h3", {}, "Fresh processes"), gridOf(entry.processes), make("p", {}, entry.speedup_from));
    if (Object.keys(entry.checks).length) {
      parts.push(make("h3", {}, "Checks"), make("p", { class: "faint" }, "docs/record-format.md describes the names."));
      for (const [name, value] of Object.entries(entry.checks)) {
        if (!isShort(value)) {
          parts.push(make("details", {}, make("summary", {}, name), make("div", { class: "wide" }, show(value))));
        }
      }
      parts.push(pairs(Object.entries(entry.checks).filter(([, value]) => isShort(value))));
    }
    parts.push(make("h3", {}, "Code"), codePanel(entry));
    return parts;
  };

  const setOpen = (row, open) => {
    const button = row.querySelector(".open");
    const next = row.nextElementSibling;
    const shown = next && next.classList.contains("detail") ? next : null;
    button.setAttribute("aria-expanded", String(open));
    if (open && !shown) {
      const cell = make("td", { colspan: String(row.cells.length) }, ...detailOf(details.rows[row.id]));
      row.after(make("tr", { class: "detail", id: `${row.id}-detail` }, cell));
      button.setAttribute("aria-controls", `${row.id}-detail`);
    }
    if (shown) shown.hidden = !open;
  };

  const isOpen = (row) => row.querySelector(".open").getAttribute("aria-expanded") === "true";

  const openTarget = () => {
    const row = document.getElementById(location.hash.slice(1));
    if (!row || !row.classList.contains("row")) return;
    if (row.hidden) resetFilters();
    setOpen(row, true);
    row.scrollIntoView({ block: "start" });
  };

  // --- filters and order ----------------------------------------------------------------------

  const form = document.querySelector("form.filters");
  const rows = table ? [...table.querySelectorAll("tr.row")] : [];

  const applyFilters = () => {
    const state = form.elements.state.value;
    const words = form.elements.words.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !((state === "all" || row.dataset.state === state) && text.includes(words));
      shown += row.hidden ? 0 : 1;
      const detail = row.nextElementSibling;
      if (detail && detail.classList.contains("detail")) detail.hidden = row.hidden || !isOpen(row);
    }
    for (const group of table.querySelectorAll("tr.group")) {
      group.hidden = ![...group.parentElement.querySelectorAll("tr.row")].some((row) => !row.hidden);
    }
    form.elements.shown.textContent = `${shown} shown`;
  };

  const resetFilters = () => {
    form.reset();
    applyFilters();
  };

  const sortBy = (header, key) => {
    const ascending = header.getAttribute("aria-sort") === "none" ? key === "number" : header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th[aria-sort]")) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const sign = ascending ? 1 : -1;
    for (const body of table.tBodies) {
      const members = [...body.querySelectorAll("tr.row")];
      members.sort((one, other) => sign * (Number(one.dataset[key]) - Number(other.dataset[key])));
      for (const row of members) {
        const detail = row.nextElementSibling;
        body.append(row);
        if (detail && detail.classList.contains("detail")) body.append(detail);
      }
    }
  };

  if (!table) return;
  table.addEventListener("click", (event) => {
    const button = event.target.closest("button.open");
    if (button) {
      const row = button.closest("tr");
      setOpen(row, !isOpen(row));
    }
    const order = event.target.closest("button[data-sort]");
    if (order) sortBy(order.closest("th"), order.dataset.sort);
  });
  form.addEventListener("input", applyFilters);
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", openTarget);
  applyFilters();
  openTarget();
})();
