// The details of one box: class, errors, standard deviations, correlations.
const details = document.getElementById("details");

function node(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(cells, parent) {
  const line = node("tr");
  line.append(...cells);
  parent.append(line);
}

function showBox(method, found, i, kind) {
  const title = node("h3", data.classes[found.labels[i]] ?? `class ${found.labels[i]}`);
  title.append(node("span", kind ?? "no pair", `kind ${kind ?? "none"}`));
  const facts = node("dl");
  const unit = data.units[data.plane[0]];
  const entries = [
    ["u", digits(method.u[found.rows[i]], 4)],
    ["score", digits(found.scores[i], 3)],
    ["IoU", digits(found.iou[i], 3)],
    ["ℓ₂", Number.isNaN(found.l2[i]) ? "no pair" : `${digits(found.l2[i], 3)} ${unit}`],
  ];
  for (const [name, value] of entries) facts.append(node("dt", name), node("dd", value));
  details.replaceChildren(title, facts, fieldsTable(found, i));
  if (found.std) details.append(correlationTable(found, i));
  else details.append(node("p", "This method gives no covariance.", "quiet"));
}

function fieldsTable(found, i) {
  const D = data.fields.length;
  const table = node("table", undefined, "fields");
  const columns = ["field", "value", "error"];
  if (found.std) columns.push("σ");
  if (found.predictive) columns.push("σ calibrated");
  const head = table.createTHead();
  row([...columns, "unit"].map((name) => node("th", name)), head);
  const body = table.createTBody();
  data.fields.forEach((name, a) => {
    const values = [found.boxes, found.errors, found.std, found.predictive].filter((values) => values);
    const cells = values.map((values) => node("td", digits(values[i * D + a], 3)));
    row([node("th", name), ...cells, node("td", data.units[a], "unit")], body);
  });
  return table;
}

function correlationTable(found, i) {
  const table = node("table", undefined, "correlations");
  table.createCaption().textContent = "Correlations";
  const body = table.createTBody();
  data.fields.forEach((name, a) => {
    const cells = [node("th", name)];
    for (let b = 0; b <= a; b++) {
      const rho = correlation(found, i, a, b);
      const text = (Math.round(100 * rho) / 100 || 0).toFixed(2).replace("-", "−"); // avoids -0.00
      const cell = node("td", a === b ? "1" : text, a === b ? "diagonal" : rho < 0 ? "negative" : "positive");
      cell.style.setProperty("--strength", `${Math.round(70 * Math.abs(rho))}%`);
      cell.title = `cov(${data.fields[b]}, ${name}) = ${digits(covariance(found, i, a, b), 3)}`;
      cells.push(cell);
    }
    row(cells, body);
  });
  row([node("th"), ...data.fields.map((name) => node("th", name))], body);
  return table;
}
