// Draws the charts of a report from the data in the file.

const data = JSON.parse(document.getElementById("data").textContent);
const smooth = document.getElementById("smooth");

function place(id, charts) {
  document.getElementById(id)?.replaceChildren(...charts.filter((each) => each !== null));
}

function draw() {
  const { curves, scores } = runCharts(data.runs ?? [], Number(smooth?.value ?? 0));
  place("curve-charts", curves);
  place("score-charts", scores);
  place("reliability-chart", data.reliability ? [reliability(data.reliability)] : []);
}

smooth?.addEventListener("input", draw);
draw();
for (const picture of document.querySelectorAll("figure > img")) zoomable(picture);
