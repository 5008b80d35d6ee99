// The list of boxes, and the details of one of them.
const details = document.getElementById("details");
const list = document.getElementById("list");

function node(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function row(cells, parent) {
  const line = node("tr");
  line.append(...cells);
  parent.append(line);
  return line;
}

const verdictOf = (found, i) => (Number.isNaN(found.l2[i]) ? "no object" : found.bad[i] ? "misplaced" : "good");

// The rows of the list, from the highest value down; choose(i) is called for a chosen box.
function listBoxes(method, found, shown, choose) {
  const body = node("tbody");
  for (const i of found.order.filter((i) => shown[i])) {
    const cells = [node("th", className(found.labels[i])), node("td", found.scores[i].toFixed(2))];
    cells.push(node("td", valueText(method, found.value[i]), "value"));
    cells.push(node("td", verdictOf(found, i), `verdict ${found.bad[i] ? "bad" : "good"}`));
    const line = row(cells, body);
    line.dataset.box = i;
    line.style.setProperty("--tone", toneOf(method, found, i));
    line.addEventListener("click", () => choose(i));
  }
  list.querySelector("tbody").replaceWith(body);
}

// Marks a row and scrolls the list, but not the page, to it.
function markRow(i) {
  for (const line of list.querySelectorAll("tbody tr")) {
    const marked = Number(line.dataset.box) === i;
    line.classList.toggle("pinned", marked);
    if (!marked) continue;
    const over = line.offsetTop - list.scrollTop;
    if (over < 24 || over > list.clientHeight - 30) list.scrollTop = line.offsetTop - list.clientHeight / 2;
  }
}

function showBox(method, found, i) {
  const title = node("h3", className(found.labels[i]));
  const kind = verdictOf(found, i);
  title.append(node("span", kind, `kind ${found.bad[i] ? "bad" : "good"}`));
  const facts = node("dl");
  const unit = data.units[data.plane[0]];
  const distance = Number.isNaN(found.l2[i]) ? "–" : `${digits(found.l2[i], 3)} ${unit}`;
  const entries = [
    [method.value.name, valueText(method, found.value[i])],
    ["score", digits(found.scores[i], 3)],
    ["IoU", digits(found.iou[i], 3)],
    ["distance", distance],
  ];
  for (const [name, value] of entries) facts.append(node("dt", name), node("dd", value));
  details.replaceChildren(title, facts, fieldsTable(found, i));
  if (found.std) details.append(epistemicPart(found, i));
  else details.append(node("p", "This method gives no covariance.", "quiet"));
}

function fieldsTable(found, i) {
  const D = data.fields.length;
  const table = node("table", undefined, "fields");
  const columns = { value: found.boxes, σ: found.predictive ?? found.std, "90 % ±": found.region, error: found.errors };
  const names = Object.keys(columns).filter((name) => columns[name]);
  row(["field", ...names, "unit"].map((name) => node("th", name)), table.createTHead());
  const body = table.createTBody();
  data.fields.forEach((name, a) => {
    const at = i * D + a;
    const cells = names.map((column) => node("td", fieldText(data.factors[a] * columns[column][at], column)));
    if (found.region && Math.abs(found.errors[at]) > found.region[at]) {
      cells[cells.length - 1].className = "outside";
      cells[cells.length - 1].title = "outside the 90 % region";
    }
    const isAxis = name === "yaw" && found.region; // front and back are not told apart
    row([node("th", isAxis ? "yaw (axis)" : name), ...cells, node("td", data.units[a], "unit")], body);
  });
  return table;
}

// Three digits, and nothing below a thousandth.
function fieldText(value, column) {
  if (Math.abs(value) < 1 && Math.abs(value) >= 0.001) return String(Number(value.toFixed(3)));
  if (!(Math.abs(value) < 0.001)) return digits(value, 3);
  return column === "σ" || column === "90 % ±" ? "< 0.001" : "0";
}

function epistemicPart(found, i) {
  const part = node("details", undefined, "more");
  part.open = showBox.isOpen ?? false;
  part.addEventListener("toggle", () => { showBox.isOpen = part.open; });
  part.append(node("summary", "Epistemic covariance"), correlationTable(found, i));
  return part;
}

function correlationTable(found, i) {
  const D = data.fields.length;
  const table = node("table", undefined, "correlations");
  table.createCaption().textContent = "Standard deviations and correlations under other weights";
  const body = table.createTBody();
  data.fields.forEach((name, a) => {
    const sigma = digits(data.factors[a] * found.std[i * D + a], 2);
    const cells = [node("th", `${name} ${sigma} ${data.units[a]}`)];
    for (let b = 0; b <= a; b++) {
      const rho = correlation(found, i, a, b);
      const text = (Math.round(100 * rho) / 100 || 0).toFixed(2).replace("-", "−"); // avoids -0.00
      const cell = node("td", a === b ? "1" : text, a === b ? "diagonal" : rho < 0 ? "negative" : "positive");
      cell.style.setProperty("--strength", `${Math.round(70 * Math.abs(rho))}%`);
      cells.push(cell);
    }
    row(cells, body);
  });
  row([node("th"), ...data.fields.map((name) => node("th", name))], body);
  return table;
}
