from stability_lab.cli import main

if __name__ == "__main__":
    main()
